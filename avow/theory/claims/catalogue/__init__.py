"""The claims of the ledger, a file for each topic or a part of one.

A file holds claims, each with its picture before it and its proof below; then, for every claim, by how much a case
breaks it (its excess), and the table `FALSIFIERS` of where to look for such cases.
"""

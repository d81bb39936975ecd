"""The claims of the ledger, a file for each topic or a part of one.

Before a claim stand its picture and by how much a case breaks it (its excess); below it, its proof.
"""

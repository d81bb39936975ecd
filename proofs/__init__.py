"""Lemmas that certificates rest on, and claims of the ledger, proved in Coq: see docs/proofs.md."""

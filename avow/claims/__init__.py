"""The ledger: statements about attention that are proved, refuted or corrected by machine."""

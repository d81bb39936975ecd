"""What is known about attention: statements with their verdicts, and weights in closed form.

- `claims`         statements about attention, each proved, refuted by a counterexample, or corrected
- `constructions`  queries, heads and ReLU networks in closed form, each with its proof
"""

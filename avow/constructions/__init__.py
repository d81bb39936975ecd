"""Closed-form weights that do what they say, each with a proof on the numbers themselves."""

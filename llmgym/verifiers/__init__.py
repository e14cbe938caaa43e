"""Rewards that can be checked: mathematics (`math`), the form of a response (`format`), programs (`code`)."""

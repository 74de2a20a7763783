"""The paper's experiment: its decoder, its data and its recipe."""

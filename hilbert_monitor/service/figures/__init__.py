"""Statistics over runs, and the plotly figures that show them."""

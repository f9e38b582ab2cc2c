"""Progress while a run goes on, and records, plots, comparisons and reports of what it left in its folder."""

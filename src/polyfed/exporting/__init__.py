"""Parts of an export: traced programs, how their inputs are prepared, and the page that explains both."""

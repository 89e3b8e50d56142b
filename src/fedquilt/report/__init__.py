"""Reading finished runs: statistics, tables and the page."""

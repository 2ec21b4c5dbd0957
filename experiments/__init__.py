"""One file a question; the only place that reads argv."""

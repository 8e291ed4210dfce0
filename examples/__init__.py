"""Programs that show the library at work; they run from a checkout and are not installed."""

"""Apps for worker processes; each finds its database by libpq's environment, as a user's would."""

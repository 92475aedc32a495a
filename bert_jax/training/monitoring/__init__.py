"""What looks after a run while it trains; none of it changes a step."""

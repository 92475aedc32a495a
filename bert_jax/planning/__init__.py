"""What can be known about a run before it is paid for."""

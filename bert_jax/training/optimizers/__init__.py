"""AdamW and LAMB by rules on parameter paths, and learning-rate schedules."""

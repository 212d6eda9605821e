"""What ranks run in tests: functions that return JSON. They import weft and numpy alone."""

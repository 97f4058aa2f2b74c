"""What carries calls out, and what both backends share."""

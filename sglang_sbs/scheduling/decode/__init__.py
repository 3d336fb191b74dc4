"""What is believed of decode instances, and which DP rank a request gets."""

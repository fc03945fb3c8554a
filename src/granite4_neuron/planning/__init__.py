"""What fits, how fast it is and how many machines it takes, without a device."""

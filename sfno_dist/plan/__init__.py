"""What a training would cost, told before it starts: memory, exchanges, balance, and the layout to take."""

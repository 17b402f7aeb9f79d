"""What a rule can declare: options, state, and views of parameters as matrices."""

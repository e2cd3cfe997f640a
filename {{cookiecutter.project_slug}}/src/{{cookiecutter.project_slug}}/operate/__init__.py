"""What an operator looks at: who leads (`status`) and what is wrong (`doctor`)."""

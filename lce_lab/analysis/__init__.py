"""What a method attended, at which distances, and how much of full attention that is: analysis of observed runs."""

"""One pool from what is wanted to what is written: the loop, and what it looks things up in."""

"""Every flag of the picker, to and from argv and the environment. Standard library only."""

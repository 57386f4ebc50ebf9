"""The program to paste: the user's own test, the layers that ran around it, and a look for the finding."""

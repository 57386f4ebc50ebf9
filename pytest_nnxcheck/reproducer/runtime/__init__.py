"""What stands in a pasted program beside the layers and the test: how a call is taken apart, run and checked."""

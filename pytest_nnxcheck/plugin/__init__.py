"""The pytest plugin. Nothing else in the package knows pytest."""

"""What pytest must know before it collects anything."""

from importlib.metadata import entry_points

pytest_plugins = ["pytester"]
if "nnxcheck" not in entry_points(group="pytest11").names:  # a checkout that is not installed
    pytest_plugins.append("pytest_nnxcheck.plugin.hooks")

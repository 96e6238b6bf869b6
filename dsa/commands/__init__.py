"""The commands of `dsa`, one in each module."""

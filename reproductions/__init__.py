"""Published systems reproduced on the simulator; README.md lists them and how to add one."""

"""The ladder, the trace, and what they print: proof on the user's own machine that the engines agree."""

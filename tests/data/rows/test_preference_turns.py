"""System turns, template variables, margins and labels of preference rows."""

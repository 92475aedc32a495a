"""Where heads attend, which dependency relations they follow, and what their attention passes on."""

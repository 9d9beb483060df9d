"""How a site learns, in steps that several methods take: plain functions and the settings they share."""

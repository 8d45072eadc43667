"""How a process joins the other ranks of its run, and how ranks learn that one of them failed."""

"""What people look at: pictures and reports."""

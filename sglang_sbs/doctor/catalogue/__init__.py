"""Every finding the doctor can make, and its wording."""

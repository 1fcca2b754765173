// Takes the place of a library that is linked and of which nothing is called.

"""README.md and the pages of docs/ keep their word.

pages           finds the code blocks of all pages, with the marks that stand before them
worlds          the directory in which whole programs run: a model, a recording
test_programs   runs each whole program of the pages in a process
test_fragments  runs each block that needs names, such as a burst, in a world made for it
test_examples_of_docstrings  runs the examples of the public classes
test_reference  compares the reference with the code: API, command line, errors, environment
test_site       builds the site, and compares navigation, index and links with the files
command_line    prints the page of the command line
"""

"""How the pages of docs/ and spec/ become a site: `make docs`.

1. `stage` copies the pages to one tree, where every link leads to a page or a file that is there.
2. `reference` adds a page for each public module, `commands` one of the command line.
3. `conf` has Sphinx make HTML of it, with warnings as errors; `diagram` draws. `build` runs it all,
   and adds what assistants read: llms.txt and each page as plain Markdown.
"""

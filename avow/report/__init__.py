"""What people look at: pages, picture files and terminal tables of data that other packages made.

Nothing here measures or computes; times and errors come from `avow.bench`.

What is shown:
    compare      a comparison of methods, and a plan: page, picture, tables
    claims       the ledger: page, one claim, tables
    profile      a model's heads and what a tolerance would save: page, tables
    audit        what was seen of other people's attention: page, table
    knowledge    answers to questions, and the knowledge experiment: pages, picture, tables
    weights      constructions: tables, JSON, file
    ranks        plans for many ranks: tables, chart
    decode_plan  plans of decode loops: tables

How it is shown:
    page         HTML pages from the templates in templates/
    charts       a chart, a plot or a table drawn by chart.js, by matplotlib, or in columns
    terminal     tables and progress in a terminal
    style        a colour and a mark for each method
    formatting   numbers as people read them
    mathml       formulas: LaTeX to MathML
"""

"""Repacks upstream's wheel with patched Python files and overlay, reproducibly, and checks the result.

``names`` file names and versions, ``record`` RECORD, ``metadata`` the few rewritten files, ``archive`` the
zip, ``recipe`` what goes in, ``gather`` collects that from the checkout, ``plan`` which members it gives,
``provenance`` and ``sbom`` the records of it, ``repack`` writes the file, ``verify`` derives it again and
compares, ``install`` tries it in scratch environments (with ``uvtool`` and ``probe``).
"""

"""Searches for good plans: exact ones and random ones side by side, each with its gap to the best and to a bound.

    whole plans       space, exhaustive, planned, reasons,         which tp, pp, ZeRO, ... is the fastest, and why;
                      way_out                                      what would do where none fits
    forms             operator_graph, moves                        captured layers as a cost graph
                      forms_found                                  answers as annotations that `train` runs
    searches          intra, priced, elimination, chain,           on one cost graph (cost_graph), compared by
                      annealing, learned, greedy, brute_force      answer and side_by_side
    stages            stages                                       layers and submeshes of a cluster
    what if           what_if                                      pin, explain, difference, front
    placements        graphs, placement, linear                    nodes on ranks, and cuts of a chain

This package imports nothing by itself; `intra` and `linear` need scipy, `placement` torch. docs/planner.md is a walk.
"""

"""What a technique needs of Lightning beyond a callback's hooks: seams in the strategy, the run's context, patches.

```
technique.py   Technique: a callback with seams, of which it overrides those it needs
run.py         Run, the context that every seam is given: trainer, module, window of accumulation, undo
strategy.py    the functions that call the techniques around a strategy's methods, for the length of a run
patches.py     all that is changed in objects of Lightning, each with its way back
homes.py       `lightning.pytorch` and `pytorch_lightning`: two packages, two sets of classes
```
"""

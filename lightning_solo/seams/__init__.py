"""Extensions of Lightning for techniques, beyond a callback's hooks: seams in the strategy, a run's context, patches.

```
technique.py   Technique: a callback with seams, of which it overrides those it needs
run.py         Run, the context that every seam receives: trainer, module, accumulation window, undo
strategy.py    the functions that call the techniques around a strategy's methods during a run
patches.py     changes of Lightning's objects, each with the function that undoes it
resuming.py    continue a fit at an exact place
homes.py       `lightning.pytorch` and `pytorch_lightning`: two packages, two sets of classes
```
"""

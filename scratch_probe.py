import torch,time
from pathlib import Path
from tempfile import TemporaryDirectory
from functools import partial
from lce.cache.layout import Budgets
from lce.cache.kv import KVCache
from lce.methods import make, Driver, Rope, RopeConfig
from lce.attention import Attention
from tests.running import layout_for, legal, vectors, cut
from tests.interrupts import *
torch.set_num_threads(1)
W=16
def build(name, knobs, folder, n=70, layers=2):
    import dataclasses
    m=make(name,knobs).resolve(W)
    q,k,v=vectors(3,4,2,n,8)
    layout=dataclasses.replace(layout_for(m,4,k,10,Budgets(host=0,spill_dir=Path(folder))),n_layers=layers)
    layout=legal(layout)
    return m,layout,(q,k,v)
for name,knobs in [("longheads",{"chunk_size":4}),("esa",{"compress":"pca","sinks":2,"local":6,"top_k":5,"low_dim":4}),("infllm",{"block_size":4,"sinks":2,"top_k":2,"local":6})]:
    with TemporaryDirectory() as f:
        m,layout,x=build(name,knobs,f)
        cache=KVCache.empty(layout); d=Driver(m,Attention.choose("torch"),W,2); rope=Rope(RopeConfig(),8,W,70)
        def step(a,b):
            part=[y[:,a:b] for y in x]
            return d.forward(cache,rope,b-a,lambda attend:[attend(l,*part) for l in range(2)])
        t=time.time()
        for a in range(0,40,10): step(a,a+10)
        t1=time.time()-t
        ps=places(lambda: (step(40,50),step(50,51)))
        print(name,t1,len(ps),len(chosen(ps,1)),len(chosen(ps,1,"/cache/","run.py")), cache.residency)

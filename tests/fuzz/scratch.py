import sys, tempfile, time, traceback, collections
from pathlib import Path
sys.path[:0]=["tests/fuzz","tests/adapters","tests/report","tests/experiments","tests/training"]
import logging,os; logging.disable(logging.CRITICAL); os.fsync=lambda fd: None
import torch; torch.set_num_threads(1)
from damage import corpus
from readers import READERS
from watching import Watch
from loopscope.errors import LoopscopeError
import shutil
only=sys.argv[1] if len(sys.argv)>1 else ""
total=0; t00=time.time()
for r in READERS:
    if only not in f"{r.name} {r.file}": continue
    base=Path(tempfile.mkdtemp(dir="/dev/shm")); whole=base/"whole"; whole.mkdir(); r.make(whole)
    if not (whole/r.file).exists():
        print("NO FILE", r.name, r.file, sorted(str(p.relative_to(whole)) for p in whole.rglob("*"))); continue
    w=base/"w"; shutil.copytree(whole,w)
    t=time.time(); good=r.read(w); t1=time.time()-t
    content=(whole/r.file).read_bytes()
    watch=Watch(base.resolve()); faults=collections.Counter(); n=0; t0=time.time(); kinds=collections.Counter()
    for case in corpus(r.suffix, content, int(sys.argv[2]) if len(sys.argv)>2 else 1):
        shutil.rmtree(w); shutil.copytree(whole,w)
        (w/r.file).write_bytes(case.content)
        if r.mend: r.mend(w, w/r.file)
        n+=1
        try:
            with watch.one(f"{r.name} {r.file} {case.name}"):
                res=r.read(w)
            kinds["result"]+=1
            if not r.right(res,good): 
                faults["WRONG"]+=1
                if faults["WRONG"]<4: print("  WRONG", r.name, r.file, "|", case.name, "|", repr(res)[:150])
        except (LoopscopeError, OSError) as e: kinds[type(e).__name__]+=1
        except BaseException as e:
            tb=traceback.extract_tb(e.__traceback__)
            own=[f for f in tb if "loopscope/" in f.filename][-1:] or tb[-1:]
            key=f"{type(e).__name__}: {str(e)[:90]} @ {own[0].filename.split('loopscope/')[-1]}:{own[0].lineno}"
            faults[key]+=1
            if faults[key]==1: print("  CASE", case.name)
    total+=n
    print(f"{r.name:28} {r.file:55} first {t1*1e3:6.0f}ms n={n} {1e3*(time.time()-t0)/n:.1f}ms/case slowest {watch.slowest:.2f} {watch.slowest_case[-40:]} {dict(kinds)}", flush=True)
    for k,v in faults.items(): print("   !!",v,k)
    for f in watch.faults[:3]: print("   ##",f)
    shutil.rmtree(base)
print(total, time.time()-t00)

/* One job, two workers, and a supervisor that may take a living worker for dead.
 *
 * What Redis does in one script is one atomic step here. Between two steps anything may happen: a worker is frozen for as
 * long as it likes (it is just not its turn), or dies, or a reply is lost and the call is made again. Spin tries every order
 * of steps: see README.md. With -DUNFENCED a settle does not look at the fence, and Spin shows what goes wrong then.
 */

#define WORKERS 2
#define DEATHS 2                 /* how many workers may die ... */
#define MISTAKES 2               /* ... and how many living ones may be taken for dead */
#define NOBODY 255

mtype = { waiting, running, done };

mtype job = waiting;             /* `jobs`, `pending`: where the one job is */
byte owner = NOBODY;             /* `active`: WORKER ... */
byte owner_fence = 0;            /* ... : FENCE */
byte fence = 0;                  /* `counts`: the last fence that was given; it only grows */
byte settled = 0;                /* how often the job was settled */
bool dead[WORKERS];
byte deaths = 0;
byte mistakes = 0;

/* turn.lua: a waiting job becomes mine, under a fence that nobody had before. */
inline claim(me, mine) {
  atomic { job == waiting -> fence++; job = running; owner = me; owner_fence = fence; mine = fence;
           printf("worker %d claims the job, fence %d\n", me, mine) }
}

/* turn.lua, the next time: what I ran is done, if it is still mine under the fence that I got it with. */
inline settle(me, mine) {
  atomic {
    if
#ifdef UNFENCED
    :: job == running ->
#else
    :: job == running && owner == me && owner_fence == mine ->
#endif
       printf("worker %d settles it with fence %d, while worker %d runs it with fence %d\n", me, mine, owner, owner_fence);
       assert(owner_fence == mine);        /* safety: only the attempt that runs now can end the job */
       job = done; owner = NOBODY; settled++
    :: else -> skip                        /* GONE: another has it, or it is done; what I did counts for nothing */
    fi
  }
}

/* recover.lua: what this worker holds goes back. */
inline give_back(whom) {
  if
  :: job == running && owner == whom ->
     job = waiting; owner = NOBODY; printf("worker %d counts as dead, the job goes back\n", whom)
  :: else -> skip
  fi
}

active [WORKERS] proctype worker() {
  byte mine;
  do
  :: claim(_pid, mine);
     /* The handler runs. Whoever takes this worker for dead now gives its job to the other one. */
     if
     :: true -> settle(_pid, mine)
     :: true -> settle(_pid, mine); settle(_pid, mine)      /* the reply was lost */
     :: atomic { deaths < DEATHS -> deaths++; dead[_pid] = true };
        !dead[_pid]                                 /* its successor begins anew */
     fi
  :: job == done -> break
  od
}

/* Death is always noticed in the end; that a worker is alive may be overlooked at any moment. */
active proctype supervisor() {
end:                             /* it may wait for ever */
  do
  :: atomic { dead[0] -> give_back(0); dead[0] = false }
  :: atomic { dead[1] -> give_back(1); dead[1] = false }
  :: atomic { mistakes < MISTAKES -> mistakes++; give_back(0) }
  :: atomic { mistakes < MISTAKES -> mistakes++; give_back(1) }
  od
}

ltl once { [] (settled <= 1) }
/* If every step that stays possible is taken at last. */
ltl ends { <> (job == done && settled == 1) }

/* One job, two workers, and a supervisor that may take a living worker for dead.
 *
 * What Redis does in one script is one atomic step here. Between two steps anything may happen: a worker is frozen for as
 * long as it likes (it is just not its turn), or dies, or a reply is lost and the call is made again, or a request is
 * delivered late: after its worker has given the connection up and has taken its turn over another one. Spin tries every
 * order of steps: see README.md. With -DUNFENCED a settle does not look at the fence, with -DUNNUMBERED a turn is taken
 * whatever its number, and Spin shows what goes wrong then.
 */

#define WORKERS 2
#ifndef DEATHS                   /* how many workers may die, how many living ones may be taken for dead, ... */
#define DEATHS 1
#define MISTAKES 1
#define DELAYS 2                 /* ... and how many requests may be late, or claims not heard of */
#endif
#define NOBODY 255

mtype = { waiting, parked, running, done };

mtype job = waiting;             /* `jobs`, `pending`: where the one job is */
byte owner = NOBODY;             /* `active`: WORKER ... (of a parked job: in whose list its id is) */
byte owner_fence = 0;            /* ... : FENCE */
byte fence = 0;                  /* `counts`: the last fence that was given; it only grows */
byte settled = 0;                /* how often the job was settled */
byte begun = 0;                  /* how often a handler was called with it */
byte registered[WORKERS];        /* `processor:P:workers`: the number of the last turn that was taken */
bool dead[WORKERS];
byte deaths = 0;
byte mistakes = 0;
byte delays = 0;

/* A turn on its way over a connection that was given up: its number (0: there is none), and the fence of what it settles. */
typedef Request { byte number; byte fence };
Request late[WORKERS];

/* holdings.lua, return_parked: what is in the list of this worker and is not its own goes back. */
inline unpark(whom) {
  if
  :: job == parked && owner == whom -> job = waiting; owner = NOBODY
  :: else -> skip
  fi
}

/* recover, and a turn that keeps nothing: so does what it holds. */
inline give_back(whom) {
  if
  :: job == running && owner == whom -> job = waiting; owner = NOBODY; printf("the job of worker %d goes back\n", whom)
  :: else -> unpark(whom)
  fi
}

/* turn, first: what the worker ran is done, if it is still its own under the fence that it got it with. */
inline settle(me, mine) {
  if
#ifdef UNFENCED
  :: mine && job == running ->
#else
  :: mine && job == running && owner == me && owner_fence == mine ->
#endif
     printf("worker %d settles it with fence %d, while worker %d runs it with fence %d\n", me, mine, owner, owner_fence);
     assert(owner_fence == mine);        /* safety: only the attempt that runs now can end the job */
     job = done; owner = NOBODY; settled++
  :: else -> skip                        /* refused: another has it, or it is done; what I did counts for nothing */
  fi
}

/* turn: settles, hands back. Whoever takes it for STALE only gives back what a late BLMOVE has parked. */
inline take_turn(me, its_number, its_fence) {
  if
#ifdef UNNUMBERED
  :: true ->
#else
  :: its_number > registered[me] ->
#endif
     registered[me] = its_number;
     settle(me, its_fence);
     give_back(me)
#ifndef UNNUMBERED
  :: else -> unpark(me)
#endif
  fi
}

/* The worker sends a turn; it may have to do so several times, each time with a new number. Then it claims, if it wants to. */
inline turn(me, its_number, mine, want) {
  do
  :: atomic { its_number++; take_turn(me, its_number, mine); mine = 0;
       if
       :: want && job == waiting ->
          fence++; job = running; owner = me; owner_fence = fence; mine = fence;
          printf("worker %d claims the job by turn %d, fence %d\n", me, its_number, mine)
       :: else -> skip
       fi };
     break
  :: atomic { delays < DELAYS && late[me].number == 0 -> delays++; its_number++;
       late[me].number = its_number; late[me].fence = mine;
       printf("worker %d sends turn %d and gives its connection up\n", me, its_number) }
  od
}

active [WORKERS] proctype worker() {
  byte number, mine, again;
  do
  :: job == waiting || owner == _pid ->     /* its list holds something that it does not know of */
     turn(_pid, number, mine, true);
     if
     :: mine == 0 -> skip                   /* another was faster */
     :: atomic { mine != 0 && delays < DELAYS -> delays++; mine = 0 }    /* the reply was lost: it asks again */
     :: mine != 0 ->
        atomic { begun++; assert(begun <= 1 + deaths + mistakes) };   /* nothing else makes a job run again */
        /* The handler runs. Whoever takes this worker for dead now gives its job to the other one. */
        if
        :: true -> turn(_pid, number, mine, false)
        :: true -> again = mine; turn(_pid, number, mine, false);
           turn(_pid, number, again, false)               /* the reply was lost */
        :: atomic { deaths < DEATHS -> deaths++; dead[_pid] = true };
           !dead[_pid]; mine = 0                          /* its successor begins anew */
        fi
     fi
  :: job == done -> break
  od
}

/* What was late is delivered: a BLMOVE that was sent along moves the id first. */
inline deliver_blmove() {
  if
  :: job == waiting -> job = parked; owner = w; printf("a late BLMOVE parks the id in the list of worker %d\n", w)
  :: true -> skip
  fi
}

inline deliver_turn() {
  printf("turn %d of worker %d arrives late\n", late[w].number, w);
  take_turn(w, late[w].number, late[w].fence);
  late[w].number = 0; late[w].fence = 0; w = 0
}

active proctype network() {
  byte w;
end:
  do
  :: atomic { late[0].number -> w = 0; deliver_blmove() }; atomic { deliver_turn() }
  :: atomic { late[1].number -> w = 1; deliver_blmove() }; atomic { deliver_turn() }
  od
}

/* Death is always noticed in the end; that a worker is alive may be overlooked at any moment. */
active proctype supervisor() {
end:                             /* it may wait for ever */
  do
  :: atomic { dead[0] -> give_back(0); dead[0] = false }
  :: atomic { dead[1] -> give_back(1); dead[1] = false }
  :: atomic { mistakes < MISTAKES -> mistakes++; printf("worker 0 counts as dead\n"); give_back(0) }
  :: atomic { mistakes < MISTAKES -> mistakes++; printf("worker 1 counts as dead\n"); give_back(1) }
  od
}

ltl once { [] (settled <= 1) }
/* If every step that stays possible is taken at last. */
ltl ends { <> (job == done && settled == 1) }

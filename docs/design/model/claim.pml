/* One job, two workers, and a supervisor that may take a living worker for dead.
 *
 * Each Redis script is one atomic step. Between two steps anything may happen: a worker is frozen for any time (it is not
 * scheduled), or dies; a reply is lost and the call is repeated; a request is delivered late, after its worker has closed
 * the connection and has taken its turn over another one. Spin tries every order of steps: see README.md. With -DUNFENCED a
 * settle does not check the fence, with -DUNNUMBERED a turn is accepted whatever its number: Spin then shows the failure.
 */

#define WORKERS 2
#ifndef DEATHS                   /* how many workers may die, how many living ones may be taken for dead, ... */
#define DEATHS 1
#define MISTAKES 1
#define DELAYS 2                 /* ... and how many requests may be late, or replies to claims lost */
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

/* A turn under way over a closed connection: its number (0: there is none), and the fence of the job that it settles. */
typedef Request { byte number; byte fence };
Request late[WORKERS];

/* return_parked in claims.lua: returns an id that is in the worker's list and that it does not own. */
inline unpark(whom) {
  if
  :: job == parked && owner == whom -> job = waiting; owner = NOBODY
  :: else -> skip
  fi
}

/* recover, and a turn that keeps nothing: returns the job that the worker holds. */
inline give_back(whom) {
  if
  :: job == running && owner == whom -> job = waiting; owner = NOBODY; printf("the job of worker %d is returned\n", whom)
  :: else -> unpark(whom)
  fi
}

/* First part of a turn: the job is done if the worker still owns it under the fence of its claim. */
inline settle(me, mine) {
  if
#ifdef UNFENCED
  :: mine && job == running ->
#else
  :: mine && job == running && owner == me && owner_fence == mine ->
#endif
     printf("worker %d settles it with fence %d, while worker %d runs it with fence %d\n", me, mine, owner, owner_fence);
     assert(owner_fence == mine);        /* safety: only the current attempt can end the job */
     job = done; owner = NOBODY; settled++
  :: else -> skip                        /* refused: another worker has the job, or it is done */
  fi
}

/* turn: settles and returns. A STALE turn only returns an id that a late BLMOVE has parked. */
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

/* The worker sends a turn, several times if needed, each time with a new number. Then it claims, if `want` is set. */
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
       printf("worker %d sends turn %d and closes its connection\n", me, its_number) }
  od
}

active [WORKERS] proctype worker() {
  byte number, mine, again;
  do
  :: job == waiting || owner == _pid ->     /* its list may hold an id that it does not know of */
     turn(_pid, number, mine, true);
     if
     :: mine == 0 -> skip                   /* the other worker was faster */
     :: atomic { mine != 0 && delays < DELAYS -> delays++; mine = 0 }    /* the reply was lost: it repeats the call */
     :: mine != 0 ->
        atomic { begun++; assert(begun <= 1 + deaths + mistakes) };   /* nothing else makes a job run again */
        /* The handler runs. If the supervisor takes this worker for dead now, the other one gets the job. */
        if
        :: true -> turn(_pid, number, mine, false)
        :: true -> again = mine; turn(_pid, number, mine, false);
           turn(_pid, number, again, false)               /* the reply was lost */
        :: atomic { deaths < DEATHS -> deaths++; dead[_pid] = true };
           !dead[_pid]; mine = 0                          /* its successor starts without a job */
        fi
     fi
  :: job == done -> break
  od
}

/* Late delivery: a BLMOVE that was sent along with the turn moves the id first. */
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

/* A death is always noticed in the end. A living worker may be taken for dead at any moment. */
active proctype supervisor() {
end:                             /* it may wait forever */
  do
  :: atomic { dead[0] -> give_back(0); dead[0] = false }
  :: atomic { dead[1] -> give_back(1); dead[1] = false }
  :: atomic { mistakes < MISTAKES -> mistakes++; printf("worker 0 counts as dead\n"); give_back(0) }
  :: atomic { mistakes < MISTAKES -> mistakes++; printf("worker 1 counts as dead\n"); give_back(1) }
  od
}

ltl once { [] (settled <= 1) }
/* Under weak fairness: every step that stays possible is taken in the end. */
ltl ends { <> (job == done && settled == 1) }

/* A worker that was given a job and does not begin it, and pulse, which gives the job to others.
 *
 * The worker may stand still before any of its steps, for as long as it likes, and go on. Positions and marks are words of
 * shared memory; each script of Redis is one atomic step. With -DUNMARKED the worker does not read the mark, with
 * -DMARK_FIRST it reads the mark before it has published its position, and with -DUNNUMBERED a rescue does not compare the
 * number of the turn: Spin shows what goes wrong then.
 */

bool position = false;           /* the worker's slot: it runs the job */
bool mark = false;               /* TAKEN in that slot */
byte turn = 1;                   /* the number that Redis has registered */
bool held = true;                /* `active`: the job is the worker's */
bool started = false;

/* turn: a new number; says whether the job is still the worker's. */
inline take_turn(mine) {
  atomic { turn++; mine = held; printf("worker takes a turn, holds the job: %d\n", mine) }
}

active proctype worker() {
  bool marked, mine = true;
#ifdef MARK_FIRST
  marked = mark;
#endif
  position = true; printf("worker publishes its position\n");
#ifndef MARK_FIRST
  marked = mark;
#endif
#ifdef UNMARKED
  marked = false;
#endif
  if
  :: marked -> position = false; take_turn(mine)
  :: else -> skip
  fi;
  if
  :: mine -> position = true; started = true; printf("worker runs the job\n");
     assert(held)                /* safety: nobody else can have it */
  :: else -> skip
  fi
}

active proctype pulse() {
  byte seen = turn;
  mark = true; printf("pulse marks the job as taken\n");
  if
  :: !position ->
     printf("pulse sees no position\n");
     /* rescue: gives the job back, if the worker has taken no other turn since. */
     atomic {
       if
#ifdef UNNUMBERED
       :: true ->
#else
       :: turn == seen ->
#endif
          assert(!started);      /* what has begun never goes back */
          held = false; printf("pulse gives the job to others\n")
#ifndef UNNUMBERED
       :: else -> skip
#endif
       fi
     }
  :: else -> skip
  fi
}

/* A worker that received a job and does not begin it, and pulse, which returns the job to others.
 *
 * The worker may stop before any of its steps for any time, and continue. Positions and marks are words of shared memory;
 * each Redis script is one atomic step. With -DUNMARKED the worker does not read the mark, with -DMARK_FIRST it reads the
 * mark before it has published its position, and with -DUNNUMBERED a rescue does not compare the number of the turn: Spin
 * then shows the failure.
 */

bool position = false;           /* the worker's slot: it runs the job */
bool mark = false;               /* TAKEN in that slot */
byte turn = 1;                   /* the number that Redis has registered */
bool held = true;                /* `active`: the job is the worker's */
bool started = false;

/* turn: a new number; returns whether the job is still the worker's. */
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
     assert(held)                /* safety: no other worker has it */
  :: else -> skip
  fi
}

active proctype pulse() {
  byte seen = turn;
  mark = true; printf("pulse marks the job as taken\n");
  if
  :: !position ->
     printf("pulse sees no position\n");
     /* rescue: returns the job, if the worker has taken no other turn since. */
     atomic {
       if
#ifdef UNNUMBERED
       :: true ->
#else
       :: turn == seen ->
#endif
          assert(!started);      /* a job that has begun is never returned */
          held = false; printf("pulse returns the job\n")
#ifndef UNNUMBERED
       :: else -> skip
#endif
       fi
     }
  :: else -> skip
  fi
}

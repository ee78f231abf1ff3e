-- tick_alive proves that the session is still ours: the token set when it was opened, and the lease the server grants it.
-- Read first: a snapshot taken while a promotion is under way hides prepared transactions, so a tick counts only when
-- recovery had ended before it began.
SELECT
	pg_is_in_recovery(),
	coalesce(current_setting('pgoutbox.session', true), ''),
	current_setting('idle_session_timeout')
